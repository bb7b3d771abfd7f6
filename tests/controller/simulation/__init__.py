"""The controller's admission and hand-out under a virtual clock."""
