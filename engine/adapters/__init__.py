"""LoRA adapters: small matrices that change what a model says, several of them beside one base model.

`peft.py` reads a folder as PEFT writes it; `targets.py` says where its matrices belong; `low_rank.py` adds them to the
decoder's products; `store.py` is the core's list of those loaded, `registry.py` the HTTP side's, by name.
"""
