"""The Gluon mainloop for Hopper and what it is made of; launches through jax-triton."""
