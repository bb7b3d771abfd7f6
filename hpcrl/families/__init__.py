"""hpcrl's own families of policies, one package each. Nothing outside imports them: hpcrl/config/family.py finds them by these names."""

PACKAGES = (
    "hpcrl.families.diffusion",
    "hpcrl.families.pi05",
    "hpcrl.families.openvla",
    "hpcrl.families.text",
)
"""A configuration's family is the first that matches; the text family takes every one."""
