"""The accelerator chips of a host, as its tools and its kernel describe them.

Texts are read by pure modules (`npu_text`, `npu_smi`, `npu_list`, `npu_topo`); `npu_tool` runs the program that prints
them. The ids of a chip (card, chip, logic, physical, bus) are only ever read, never computed from each other.
"""
