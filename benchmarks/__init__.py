"""Measurements of jaxops beside what its users have without it. Each `bench_<op>` writes rows; `report` reads them."""
