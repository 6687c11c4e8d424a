"""Follows every storage of a step, on any device and on fake tensors alike.

    live = Live([model], [optimizer], device)
    with live:
        training_step(...)
    live.account()
    live.flops

A dispatch mode sees what every operator returns and keeps a weak reference to its storage. What it cannot know at that
moment, whether a tensor is kept for the backward pass or a gradient, `lives.account` says afterwards. Three things that
PyTorch hides are looked after: FSDP2 frees gathered weights by resizing their storage to nothing; a DTensor's operator
comes again with the local tensors, which are the ones that take memory; DDP's buckets are made in C++ and show up as
gradients. Counted is what the step makes and its states; the batch and constants made before it are not.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from harness.ledger.step import Category
from harness.trace.flops import operations
from harness.trace.known import gradients, optimizer_tensors, weights
from harness.trace.lives import Account, Life, Lives, Phase, account

OUTSIDE = "other"
"""Stands for a block where none is running: the loss, learned positions."""
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_BLOCK = re.compile(r"^(?:layers\.\w+|[^.]+)$")
"""Modules that bytes are attributed to: each layer, and what stands beside the list of layers."""
_WRAPPER = re.compile(r"^(?:module|_orig_mod)\.")


class Live(TorchDispatchMode):
    """Notes births and deaths of storages on one device while it is entered."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[object],
        device: torch.device | str = "cpu",
        main_gradients: Sequence[Tensor] = (),
    ) -> None:
        """`main_gradients`: buffers that gradients are added up in, beside the parameters' own."""
        super().__init__()
        self.lives = Lives()
        self.flops = 0
        self._models, self._optimizers, self._main = models, optimizers, main_gradients
        self._device = torch.device(device).type
        self._current: dict[int, Life] = {}
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._phase: Phase = "forward"
        self._modules: list[str] = [OUTSIDE]
        self._parameters = [parameter for model in models for parameter in model.parameters()]
        self._handles: list[RemovableHandle] = []
        self._tentative: set[int] = set()
        self._resize: Callable[..., Any] = torch.UntypedStorage.resize_

    def __enter__(self) -> Live:
        self._resident(weights(self._models), "weights")
        self._find_gradients()
        self._resident(optimizer_tensors(self._optimizers, self._models), "optimizer")
        for model in self._models:
            self._handles.append(model.register_forward_pre_hook(self._forward_begins, prepend=True))
            for name, module in model.named_modules():
                while _WRAPPER.match(name):
                    name = _WRAPPER.sub("", name)
                if (
                    _BLOCK.match(name)
                    and name != "module"
                    and not isinstance(module, nn.ModuleList | nn.ModuleDict)
                ):
                    self._handles += self._name(module, name)
        self._handles.append(register_optimizer_step_pre_hook(self._update_begins))
        torch.UntypedStorage.resize_ = self._resized()  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        while self._handles:
            self._handles.pop().remove()
        self._find_gradients()
        for tensor in optimizer_tensors(self._optimizers, self._models):  # states that this step made
            if (
                life := self._current.get(tensor.untyped_storage()._cdata)
            ) is not None and life.known is None:
                life.known = "optimizer"
        self._watched.clear()

    def account(self) -> Account:
        """What the step held."""
        return account(self.lives)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(_is_wrapper(kind) for kind in types):
            return NotImplemented
        if torch._C._current_graph_task_id() != -1:
            self._enter("backward")
        elif self._phase == "backward":
            self._enter("update")
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace in _COLLECTIVES:
            self.touched((args, kwargs, result))
        if func.namespace != "c10d" and not _returns_alias(func):  # those return what they were given
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor):
                    self._seen(tensor)
        self.flops += operations(func, args, kwargs, result)
        return result

    def touched(self, tensors: Any) -> None:
        """A collective reads or writes these; called from here, and for what PyTorch's C++ starts by
        harness.parallel.recorder."""
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor) and not _is_wrapper(type(tensor)):
                self._communicated(tensor)

    def _seen(self, tensor: Tensor) -> None:
        if tensor.device.type != self._device or _is_wrapper(type(tensor)):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._current:
            self._bear(storage, shape=tuple(tensor.shape))
        elif key in self._tentative:  # made within the operator whose collective showed it first
            self._tentative.remove(key)
            self.lives.num_events += 1
            life = self._current[key]
            life.born, life.phase, life.module = self.lives.num_events, self._phase, self._modules[-1]

    def _bear(
        self,
        storage: torch.UntypedStorage,
        known: Category | None = None,
        resident: bool = False,
        shape: tuple[int, ...] = (),
    ) -> Life:
        key = storage._cdata
        if not resident:
            self.lives.num_events += 1
        born = 0 if resident else self.lives.num_events
        life = Life(storage.nbytes(), born, self._phase, self._modules[-1], known=known, shape=shape)
        self.lives.all.append(life)
        self._current[key] = life
        self._watched[key] = weakref.ref(storage, lambda _: self._die(key))
        return life

    def _die(self, key: int) -> None:
        self._watched.pop(key, None)
        self._tentative.discard(key)
        life = self._current.pop(key, None)
        if life is not None:
            self.lives.num_events += 1
            life.died = self.lives.num_events

    def _resident(self, tensors: Iterable[Tensor], category: Category) -> None:
        for tensor in tensors:
            if tensor.device.type != self._device:
                continue
            storage = tensor.untyped_storage()
            life = self._current.get(storage._cdata)
            if life is None:
                self._bear(storage, category, resident=True, shape=tuple(tensor.shape))
            elif life.known is None:
                life.known = category

    def _communicated(self, tensor: Tensor) -> None:
        if tensor.device.type != self._device:
            return
        storage = tensor.untyped_storage()
        life = self._current.get(storage._cdata)
        if life is None:  # a buffer from an earlier step, such as a pipeline's for what it receives
            life = self._bear(storage, resident=True, shape=tuple(tensor.shape))
            self._tentative.add(storage._cdata)
        life.communicated = True

    def _resized(self) -> Callable[[torch.UntypedStorage, int], Any]:
        original = self._resize

        def resize(storage: torch.UntypedStorage, num_bytes: int) -> Any:
            result = original(storage, num_bytes)
            self._die(storage._cdata)
            if num_bytes:
                self._bear(storage, "communication")
            return result

        return resize

    def _enter(self, phase: Phase) -> None:
        if phase == self._phase:
            return
        if self._phase == "backward":
            self._find_gradients()
        self._phase = phase
        self.lives.changes.append((self.lives.num_events + 1, phase))

    def _find_gradients(self) -> None:
        self._resident((*gradients(self._parameters), *self._main), "gradients")

    def _forward_begins(self, *_: Any) -> None:
        if torch._C._current_graph_task_id() == -1:
            self._enter("forward")

    def _update_begins(self, *_: Any) -> None:
        self._find_gradients()
        self.lives.update = self.lives.num_events

    def _name(self, module: nn.Module, name: str) -> list[RemovableHandle]:
        def before(*_: Any) -> None:
            self._forward_begins()
            self._modules.append(name)

        def after(*_: Any) -> None:
            if len(self._modules) > 1:
                self._modules.pop()

        return [
            module.register_forward_pre_hook(before, prepend=True),
            module.register_forward_hook(after, always_call=True),  # a recomputation may stop half-way
        ]


_wrappers: dict[type, bool] = {}
_aliases: dict[Any, bool] = {}


def _is_wrapper(kind: type) -> bool:
    """Whether tensors of this class hold others (DTensor, AsyncCollectiveTensor) and no memory of their own."""
    known = _wrappers.get(kind)
    if known is None:
        known = _wrappers[kind] = hasattr(kind, "__tensor_flatten__")
    return known


def _returns_alias(func: Any) -> bool:
    """Views and in-place operators: what they return was there before."""
    known = _aliases.get(func)
    if known is None:
        returns = func._schema.returns
        known = _aliases[func] = bool(returns) and all(each.alias_info is not None for each in returns)
    return known
