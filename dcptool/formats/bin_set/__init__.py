"""A model in several files of torch.save, as transformers, peft and diffusers wrote them before safetensors.

format   which files there are, as a value
reader   a folder or an index into a `Checkpoint`
"""
