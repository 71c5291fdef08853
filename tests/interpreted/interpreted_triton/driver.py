from __future__ import annotations

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class Driver(DriverBase):
    @classmethod
    def is_active(cls):
        return True

    def get_current_target(self):
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self):
        import torch

        return torch.device("cpu")

    def get_device_interface(self):
        import torch

        return torch.cpu

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("interpreted kernels have no C++ side")

    def get_benchmarker(self):
        raise NotImplementedError("interpreted kernels are not timed")
