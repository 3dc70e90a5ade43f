"""What is read from the files that the compiler for TPUs writes; the compiling itself is make tpu-compile's."""

from helpers.dev import tpu_compile

ALLOCATIONS = """
  #allocation0 [shape = 'u32[]', space=smem, size = 0x4, offset = 0x4, fixed_abs, tag = 'smem constant byte address']
  #allocation2 [shape = 'f32[1,512]{1,0:T(1,128)}', space=vmem, size = 0x800, scoped, tag = 'scratch operand']
    #allocation8 [shape = 'u8[262144]{0}', space=vmem, size = 0x40000, scoped, tag = 'input window']
  %16 = dma.vmem_to_smem /*vmem=*/%s14, /*size_in_granules=*/16
"""
UNITS = """== CAPACTIY:
MATMUL, MATPUSH, XLU, VSTORE, VSTORE:SPILL, SALU
    4     4     3     1     1     2
== UTILIZATION:
0 1 0 1 2 0
2 0 0 0 0 0
0 0 3 1 1 0
1 0 0 0 0 0
0 0 0 0 1 0
"""


def test_vmem_is_the_sum_of_its_allocations():
    assert tpu_compile.bytes_of_vmem(ALLOCATIONS) == 0x40800


def test_bundles_are_counted_from_the_first_product_to_the_last():
    assert tpu_compile.schedule(UNITS) == (3, 4)


def test_what_the_compiler_wrote_of_kernels_is_read(tmp_path):
    for name in ("flash_attention_tpu_dq.1", "copy.9"):
        (tmp_path / f"17-{name}-02-original.txt").write_text(ALLOCATIONS)
        (tmp_path / f"17-{name}-70-final_hlo-static-per-bundle-utilization.txt").write_text(UNITS)
    found = tpu_compile.kernels_of(tmp_path)
    assert found == {"flash_attention_tpu_dq": {"vmem": 0x40800, "bundles": 3, "spills": 4}}
