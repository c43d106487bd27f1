"""What compute-sanitizer runs on a GPU names every op that has kernels."""

import pathlib
import re

FILES = "sanitize", "ops/sanitized_attention", "ops/sanitized_fp8"
ROOT = pathlib.Path(__file__).parents[2]


def test_every_op_with_kernels():
    source = "".join((ROOT / f"tests/{name}.py").read_text() for name in FILES)
    kernels = [*ROOT.glob("jaxops/ops/*/*_pallas.py"), *ROOT.glob("jaxops/ops/*/*_triton.py")]
    ops = {file.parent.name for file in kernels}
    assert len(ops) > 8
    assert not [op for op in ops if not re.search(rf"jaxops\.{op}\(", source)]
    assert list(ROOT.glob("jaxops/parallel/*_mosaic.py"))
    assert "collective_products" in source
