"""The operations under routers and experts, two files each.

`x.py` says what an operation computes, in plain PyTorch: the definition of correct, and what runs
on a CPU. `x_triton.py` holds the GPU's kernels and makes them an operator of torch, with autograd,
so that compilers and CUDA graphs take it in. `backend.py` chooses between the two.
"""
