"""Import torchtitan where there is no triton, which has no kernels for CPUs: what is asked of it is never called."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch._dynamo
import torch._functorch.partitioners
import torch._inductor.compile_fx
import torch.distributed.pipelining  # noqa: F401  # all of these look for triton, which is not to be found by then


class Anything:
    """Whatever name is asked for."""

    def __getattr__(self, name):
        return Anything()

    def __getitem__(self, key):
        return Anything()

    def __call__(self, *args, **kwargs):
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else Anything()


class Stand(ModuleType):
    def __init__(self, name):
        super().__init__(name)
        self.__spec__, self.__path__ = ModuleSpec(name, None, is_package=True), []
        sys.modules[name] = self

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


triton = Stand("triton")
triton.language = Stand("triton.language")
triton.language.extra = Stand("triton.language.extra")
