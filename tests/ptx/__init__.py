"""A PTX emulator on NumPy: runs the compiled Triton kernels on the CPU, and finds what a GPU would not forgive.

    python -m tests.ptx                every variant of every kernel in four orders of warps, against the CPU's
    python -m tests.ptx --mutations    faults put into the PTX, one at a time: which of them are found

parse         a kernel's text as instructions
forms         which instructions there are
opcodes       what each instruction computes, as one table
operands      how it reads and writes registers
instructions  both together, and those that reach memory
memory        the tensors of a launch and the shared memory of its programs: bounds and alignment
places        bytes that several warps or lanes have had
races         accesses that nothing orders
warp          32 lanes and their registers
machine       barriers, and the order in which warps run
run           a launch of onebit.kernels.gpu.launch, executed on the tensors that were passed
cases         which launches, and how their results are compared; workloads and sparse are kinds of them
mutants       faults in the text of a kernel
"""
