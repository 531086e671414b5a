"""Every private name of torch that shardwright relies on, and why.

Private names may change in any release of torch. A name that is used anywhere in the package must be listed here, and
every listed name must exist in the torch that is installed: `tests/test_torch_private.py` checks both, so that a new
torch fails a test that names what it lacks. A listed name covers everything below it.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["PRIVATE_NAMES", "resolve"]

PRIVATE_NAMES: dict[str, str] = {
    # Dispatch above autograd: whether and how torch calls __torch_function__.
    "torch._C.DisableTorchFunctionSubclass": "calls on local tensors must not come back to the dispatcher",
    "torch._C._EnableTorchFunction": "user code that runs inside a local call must come back to the dispatcher",
    "torch._C._disabled_torch_function_impl": "the cheapest call on local tensors: no context manager",
    "torch._C._is_torch_function_enabled": "patched functions of torch must respect DisableTorchFunctionSubclass",
    "torch.nn.Module._call_impl": "tells a frame of a module's forward from a function to decompose",
    "torch._ops": "operators are found and named by their OpOverload and OpOverloadPacket",
    "torch._prelu_kernel": "F.prelu decomposes into it, so it needs a rule of its own",
    "torch._assert_async": "checks a range of indices on the device without waiting for the host",
    "torch._C._nn": "functions of torch.nn.functional are written in C++ there, and are called by those names",
    "torch._has_compatible_shallow_copy_type": "decides whether Module.to swaps a parameter or sets its data",
    # Modes below us: FakeTensorMode, tracing, selective checkpointing.
    "torch._C._DisablePythonDispatcher": "work that is not part of the program must not be seen by dispatch modes",
    "torch._C._DisableTorchDispatch": "work that is not part of the program must not be seen by dispatch modes",
    "torch._C._TorchDispatchModeKey": "finds the fake and the proxy mode among the active ones",
    "torch._C._get_dispatch_mode": "finds the fake and the proxy mode among the active ones",
    "torch._C._len_torch_dispatch_stack": "tells quickly that no dispatch mode is active",
    "torch._C.DispatchKey": "tells whether a pre-dispatch trace (torch.export) is active",
    "torch._C._dispatch_tls_is_dispatch_key_included": "tells whether a pre-dispatch trace (torch.export) is active",
    "torch.utils._python_dispatch": "TorchDispatchMode, the public base class of modes, has no public path",
    "torch._subclasses.fake_tensor": "shapes of results on ranks outside the mesh are computed with fake tensors",
    # Kernels.
    "torch.ops.aten._scaled_dot_product_flash_attention": "the log-sum-exp by which blocks of attention are merged",
    "torch.ops.aten._scaled_dot_product_flash_attention_backward": "takes the log-sum-exp over all blocks",
    # Autocast.
    "torch._C._is_any_autocast_enabled": "plans are cached by the autocast state",
    "torch._C._dispatch_get_all_op_names": "which operators autocast casts is read from torch's own registry",
    "torch._C._dispatch_has_kernel_for_dispatch_key": "which operators autocast casts, by torch's own registry",
    # Autograd.
    "torch._C._FunctionBase": "saved_tensors of a user's autograd.Function must be DTensors again",
    "torch.autograd.function._SingleLevelFunction": "apply of a user's autograd.Function runs on local tensors",
    "torch.autograd.Variable._execution_engine": "queue_callback: an action at the end of the backward pass",
    "torch.autograd.grad_mode._force_original_view_tracking": "views of empty shards keep their graph after a write",
    "torch.autograd.graph._engine_run_backward": "backward of DTensors: gradients are redistributed before and after",
    "torch._C._current_graph_task_id": "tells whether this is a backward pass",
    "torch._C._will_engine_execute_node": "tells whether a backward pass accumulates gradients or returns them",
    "torch._C._set_grad_enabled": "captured programs set grad mode as a step",
    "torch._C._autograd": "saved-tensor hooks and the creation metadata of views have no public accessors",
    "torch.utils.checkpoint._CheckpointFrame": "activation checkpoints recompute with the layouts of the forward",
    "torch.utils.hooks.BackwardHook._apply_on_tensors": "module backward hooks must be given DTensors",
    "torch.nn.modules._functions.BackwardHookFunction": "module backward hooks must be given DTensors",
    "torch._functorch": "torch.func transforms and vmap see local tensors, and are refused",
    "torch._C._functorch": "torch.func transforms and vmap see local tensors, and are refused",
    # Memory and views.
    "torch.Tensor._is_view": "set_ and resize_ of a view are refused",
    "torch.Tensor._make_wrapper_subclass": "a ShardedTensor has the global shape and no memory of its own",
    "torch._C._set_throw_on_mutable_data_ptr": "reading the memory of a ShardedTensor raises instead of crashing",
    "torch._C._storage_Use_Count": "finds out whether a storage is shared with a tensor we do not know",
    "torch._C._swap_tensor_impl": "torch.utils.swap_tensors and set_ on a DTensor keep its Python object",
    # Modules and optimizers.
    "torch.nn.Module._load_from_state_dict": "modules that override it are loaded through load_state_dict",
    "torch.nn.Module._save_to_state_dict": "modules that override it are loaded through load_state_dict",
    "torch.nn.modules.module": "global module hooks: guards of captured programs, and registration of parameters",
    "torch.optim.optimizer._foreach_supported_types": "optimizers take their foreach implementation for DTensors",
    "torch.utils._foreach_utils._foreach_supported_types": "optimizers take their foreach implementation for DTensors",
    # Functions that make tensors.
    "torch.utils._device._device_constructors": "torch's own list of functions that make tensors",
    "torch.jit._builtins": "patched functions stay known to TorchScript",
    "torch.jit._recursive": "scripted modules that are given DTensors",
    "torch._C.ScriptFunction": "scripted functions that are given DTensors",
    "torch._C.ScriptMethod": "scripted modules that are given DTensors",
    "torch.cuda.jiterator._create_multi_output_jit_fn": "one CUDA kernel gives all words of a Philox block",
    # Compilers.
    "torch._C._dynamo.eval_frame": "torch.compile must not trace the dispatcher's own frames",
    "torch.fx.node._get_qualified_name": "captured programs are printed with the names that torch.fx uses",
    "torch.utils._pytree": "nested arguments are flattened as torch's own functions flatten them",
    # Processes.
    "torch._C._distributed_c10d": "stores have no public path for annotations and isinstance",
    "torch.distributed.device_mesh._mesh_resources": "the mesh of an enclosing `with mesh:`",
    "torch.distributed.distributed_c10d._get_default_store": "ranks publish their addresses in the group's store",
    "torch.distributed.distributed_c10d._world": "which process groups exist, and their names",
    # PyTorch's own DTensor and ShardedTensor, in `interop` alone.
    "torch.distributed._shard": "PyTorch's ShardedTensor is converted to ours and back",
    "torch.distributed.remote_device._remote_device": "the placement of a shard of PyTorch's ShardedTensor",
    "torch.distributed.tensor.placement_types._StridedShard": "how FSDP2 with tensor parallelism shards twice",
    # Files of others, in `interop` alone.
    "torch._utils._rebuild_tensor_v2": "torch.load calls it for each tensor of a file, so the file names it",
    "torch._utils._rebuild_tensor_v3": "torch.load calls it for tensors of dtypes without a storage class",
    "torch.distributed.checkpoint.filesystem._StorageInfo": "where a distributed checkpoint has each chunk",
    "torch.storage._dtype_to_storage_type_map": "files name the storage class of a dtype",
    # Tests.
    "torch.testing._internal": "torch's database of operators, with sample inputs",
}


def resolve(name: str) -> Any:
    """Return the object of a dotted name; raise `AttributeError` or `ImportError` if this torch does not have it.

    >>> resolve("torch.nn.Module._call_impl").__name__
    '_call_impl'
    """
    found: Any = importlib.import_module("torch")
    path = "torch"
    for part in name.split(".")[1:]:
        path = f"{path}.{part}"
        if not hasattr(found, part):
            found = importlib.import_module(path)
        else:
            found = getattr(found, part)
    return found
