"""Is my tensor-parallel model right? If not: which parameter is wrong, and why?

    python tools/audit.py my_model.py --ranks 2 4
    python tools/audit.py --example tp            also: dtensor, hf

my_model.py defines

    build() -> nn.Module                    the full model
    parallelize(model, tp_group) -> Module  your parallel version of it, made in any way
    batch(step) -> (inputs, target)         inputs: a tensor, a tuple of arguments, or
                                            a dict of keyword arguments

and may define

    loss(output, target)                    or loss(output, target, tp_group), where
                                            tp_group is None for the full model; also
                                            with a last argument named model. output is
                                            what the model returns, or its logits.
                                            Default: cross entropy for integer targets,
                                            otherwise the mean squared error
    after_backward(model)                   sums of gradients that your training makes
                                            once per step, after the last micro-batch
    after_each_backward(model)              the same, after each micro-batch
    clip(model, max_norm) -> norm           your own clipping
    optimizer(parameters)                   or optimizer(named_parameters);
                                            default: AdamW
    names() -> dict                         parallel name → full name, of modules or
                                            parameters whose names differ

If your code makes its shards with random values, copy the full model's into them:

    from audit import from_full
    from_full(model, full, tp_group)        by name and shape

The tool starts the ranks itself (gloo on CPU, NCCL if each rank has a GPU) and compares
with one process. docs/audit.md says what it compares, and how it finds a rank's piece.

It ends with RIGHT (exit code 0), and what was not compared; WRONG (1): a fault, or the
parallel model raised an error or was aborted; or NOT KNOWN (2, as for wrong use).
"""

import importlib.util
import os
import sys

if __name__ == "__main__":  # `import audit` finds the package next to this file
    if importlib.util.find_spec("torch") is None:
        print("error: this Python has no torch; see README.md, Start", file=sys.stderr)
        sys.exit(2)
    if "AUDIT" in os.environ:
        from audit import rank

        rank.main()
    from audit import command

    sys.exit(command.main(text=__doc__))
