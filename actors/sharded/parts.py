"""Loading of a rank's part of a model, with a check that all parts together compute the same as the whole."""

from __future__ import annotations

from transformers import PreTrainedModel

from outrider.actors.ranks import GroupError
from outrider.actors.sharded.pipeline_parallel import take_part as take_layers
from outrider.actors.sharded.shard import ModelPart, ShardSpec
from outrider.actors.sharded.tensor_parallel import take_part as take_slices
from outrider.engine.errors import one_line
from outrider.engine.forward.runner import kv_shape
from outrider.engine.forward.sharded import probe_logits

MOST_DIFFERENT = 0.1  # relative error of the logits: half precision gives about 0.01, a wrong split about 1


def take_checked(model: PreTrainedModel, shard: ShardSpec) -> ModelPart:
    """Reduce a model to a shard's part, in place; raise GroupError if its logits change. All ranks call it, after ``meet``."""
    # DeepSpeed silently splits architectures with fused projections at wrong positions, so the logits of a few rows are compared
    # before and after.
    whole = probe_logits(model, kv_shape(model)) if shard.rank == 0 else None
    part = take_slices(model, shard) if shard.mode == "tensor" else take_layers(model, shard)
    try:
        given = probe_logits(model, part.shape)
    except (RuntimeError, ArithmeticError) as error:
        raise GroupError(f"{type(model).__name__} cannot compute in {shard.world_size} parts: {one_line(error)}") from error
    if whole is not None:
        difference = float((given - whole).norm() / whole.norm())
        if not difference <= MOST_DIFFERENT:
            raise GroupError(
                f"{type(model).__name__} in {shard.world_size} parts differs from the whole model: its logits differ by "
                f"{difference:.0%}; parallelism.mode {shard.mode} does not support this architecture, choose another mode"
            )
    return part
