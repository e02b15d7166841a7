"""Load a folder as transformers does and give the loss of a batch. Usage: pretrained.py FOLDER STEP OUT.json."""

import json
import sys

import torch
from going_on import numbers
from transformers import AutoModelForCausalLM

folder, step, out = sys.argv[1:]
model, told = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
words = numbers(int(step), 12, 5, high=33)
with torch.no_grad():
    loss = model(input_ids=words, labels=words).loss.item()
with open(out, "w") as file:
    json.dump({"loss": loss, "wrong": sorted(map(str, [*told["missing_keys"], *told["unexpected_keys"]]))}, file)
