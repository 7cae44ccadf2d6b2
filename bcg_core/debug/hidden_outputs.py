"""Tensors that leave a break by the back door."""

from torch import Tensor

from bcg_core.debug.record import CaptureRecord, memory_of
from bcg_core.debug.tool import Tool
from bcg_core.errors import HiddenOutputError


class HiddenOutputDetector(Tool):
    """Refuse a capture in which a tensor that a break made, and did not return, is used outside of breaks.

    At replay the break makes another tensor and puts it where it put the first (an attribute, a list); the segment, or
    the later break that was called with it, goes on with the first, which nobody refreshes and which may be freed.
    A later break that finds the new tensor by itself, in the attribute, is right, and is not accused.

    Not seen: tensors made below the dispatcher, as ``torch.from_numpy`` does, and uses inside kernels that
    ``torch.compile`` made.
    """

    def touches(self, record: CaptureRecord, tensor: Tensor, where: str) -> None:
        """Refuse ``tensor`` if a break made it and kept it from the graph."""
        made = record.made.get(memory_of(tensor))
        if made is None:
            return
        raise HiddenOutputError(
            f"{made.site} made a {tuple(tensor.shape)} {tensor.dtype} tensor ({made.operation}) and did not return it, "
            f"but {where} uses it: at replay the break makes another one, which is not looked at. Return it from the "
            "break, or write it into a tensor that exists before"
        )
