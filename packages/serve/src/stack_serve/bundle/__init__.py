"""Bundles: exported models that run without the code that made them."""

from stack_serve.bundle.exporting import Function as Function
from stack_serve.bundle.exporting import RowsDependWarning as RowsDependWarning
from stack_serve.bundle.exporting import export as export
from stack_serve.bundle.integrity import verify as verify
from stack_serve.bundle.manifest import Manifest as Manifest
from stack_serve.bundle.opened import Bundle as Bundle
from stack_serve.bundle.opened import load as load

__all__ = ["Bundle", "Function", "Manifest", "RowsDependWarning", "export", "load", "verify"]
