"""The operations under routers and experts, two files each.

`x.py` says what an operation computes, in plain PyTorch: the definition of correct, and what runs
on a CPU. Where it ends in an operator of torch, compilers and CUDA graphs take in the GPU's way.
`x_triton.py` holds the Triton kernels and their launches. `backend.py` chooses between the two.
"""
