"""A stand-in for vLLM in runs whose faults have nothing to do with a real engine: it speaks the part of vLLM's HTTP API that hpcrl uses.

It comes first on PYTHONPATH in the jobs of such a run (tests/faults/scenario.py), so that hpcrl/engines/vllm/main.py finds it under vLLM's name.
"""
