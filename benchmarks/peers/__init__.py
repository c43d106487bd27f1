"""The other libraries that are measured beside jaxops."""
