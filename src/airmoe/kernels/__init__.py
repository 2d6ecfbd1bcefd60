"""The operations under routers and experts, two files each.

`x.py` says what an operation computes, in plain PyTorch: the definition of correct, and what runs
on a CPU. It also declares the operator that runs on a GPU, with its fake and its autograd, so that
compilers and CUDA graphs take it in. `x_triton.py` has the kernels and what launches them;
`backend.py` chooses between the two.
"""
