"""The random generators of this process as one stateful thing."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


class RandomState:
    """The state of Python's, numpy's and torch's random generators, of the accelerator's too, for `per_rank`."""

    def state_dict(self) -> dict[str, Any]:
        """Return the states; numpy's only if something has imported it."""
        state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            state["numpy"] = numpy.random.get_state()
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the generators that have a state in there."""
        random.setstate(state["python"])
        torch.set_rng_state(state["torch"])
        if "numpy" in state:
            import numpy

            numpy.random.set_state(state["numpy"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
