"""A Triton backend `cpu` that compiles nothing: with TRITON_INTERPRET=1 every kernel runs in Triton's own interpreter.

Triton finds it by an entry point, and vLLM asks no more than that it is there: so vLLM's second model runner, the only one that
knows the method `dspark`, runs on machines without a GPU.
"""
