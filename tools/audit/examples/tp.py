"""Lesson 02's transformer, edited by hand: for tools/audit.py --example tp."""

import importlib

import torch

lesson = importlib.import_module("02_transformer_tp")
CONFIG = lesson.Config(30, 32, 4, 4, 2, 12, 0.1)


def build():
    return lesson.Transformer(CONFIG)


def parallelize(model, tp_group):
    return lesson.tp_transformer(model, tp_group)


def batch(step):
    tokens = torch.randint(CONFIG.vocab_size, (2, 3, CONFIG.seq_len))
    return tokens[0], tokens[1]
