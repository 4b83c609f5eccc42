"""From a model's vocabulary to pipelines of the `tokenizers` library, one module per kind of tokenizer.

Start reading at `pipeline.py`: what a pipeline is, and `build_pipeline`. Nothing here imports torch.
"""
