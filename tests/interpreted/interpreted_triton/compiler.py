from __future__ import annotations

from triton.backends.compiler import BaseBackend


class Backend(BaseBackend):
    @staticmethod
    def supports_target(target) -> bool:
        return target.backend == "cpu"

    def hash(self) -> str:
        return "interpreted"

    def parse_options(self, options: dict) -> object:
        return options

    def add_stages(self, stages: dict, options: object, language) -> None:
        raise NotImplementedError("set TRITON_INTERPRET=1: this backend compiles nothing")

    def load_dialects(self, context) -> None:
        pass

    def get_module_map(self) -> dict:
        return {}
