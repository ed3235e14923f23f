"""Bugs of script 10: edits of a few lines that people have shipped."""

BUGS = {
    "moments": dict(
        what="the weights are loaded, AdamW's moments are not",
        old="""\
    optimizer.adamw.state[optimizer.vector] = adam
""",
        new="",
        symptom="the first loss after the load is right, the next ones are not",
        why="a new AdamW has moments of 0, and the loaded ones never reach it",
        reported="github.com/KempnerInstitute/KempnerForge/pull/115",
    ),
    "step": dict(
        what="AdamW counts its steps from 0 again after a load",
        old="""\
    adam["step"] = torch.tensor(float(step))
""",
        new="""\
    adam["step"] = torch.tensor(0.0)
""",
        symptom="right weights and moments, but updates of another size from then on",
        why="AdamW divides its moments by 1 − βˢᵗᵉᵖ, because they started at 0",
        reported="github.com/TrenTorch/TrenTorch/pull/187",
    ),
    "stale": dict(
        what="AdamW's own copy of the weights is not loaded",
        old="""\
    optimizer.vector.data = optimizer.local_slice(training.parameters)
""",
        new="",
        symptom="the first loss after the load is right; then the old weights are back",
        why="AdamW updates its vector, and copies that over what has been loaded",
        reported="github.com/NVIDIA/Megatron-LM/issues/174",
    ),
    "tied-copy": dict(
        what="a tied weight is saved and loaded by the stage that updates it (--tie)",
        old="""\
    for name, p in training.parameters.items():
""",
        new="""\
    for name, p in training.optimizer.parameters.items():
""",
        flags="--tie",
        symptom="right on one stage; on two stages the loss after the load is wrong",
        why="the last stage has its own copy as the head, which stays at its start",
        reported="github.com/sgl-project/sglang/pull/15890",
    ),
    "position": dict(
        what="the data starts from the beginning after a load",
        old="""\
        batch = batches[step - 1]
""",
        new="""\
        batch = batches[step - begin - 1]
""",
        symptom="no error, and losses look good: the model has seen these batches",
        why="the position in the data is state as well, and was not restored",
        reported="github.com/huggingface/accelerate/issues/685",
    ),
    "in-place": dict(
        what="files are written under the checkpoint's final name",
        old="""\
    part = folder / f"part_{step:06}"
""",
        new="""\
    part = folder / f"step_{step:06}"
""",
        symptom="none until a save is interrupted: then the latest one is unusable",
        why="a folder looks latest from its first file on, and is complete at its last",
        reported="github.com/RLinf/RLinf/pull/1469",
    ),
}
