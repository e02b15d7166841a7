"""Import what ranks need, once for all that are forked then."""

import gc

gc.disable()

import pytest  # noqa: E402, F401
import torch._dynamo  # noqa: E402 - the first optimizer would
import torch.distributed.checkpoint  # noqa: E402
import torch.distributed.fsdp  # noqa: E402
import torch.distributed.tensor.parallel  # noqa: E402, F401

import dcptool.training  # noqa: E402, F401

gc.freeze()  # else each rank looks through all of it for garbage, and copies the pages
gc.enable()
