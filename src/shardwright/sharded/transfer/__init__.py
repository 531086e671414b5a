"""Transfers of regions between ranks: plans and their execution, gather, scatter, reshard and remote shards."""

from shardwright.sharded.transfer.transfer_plan import TransferPlan, plan_transfer, plan_transfer_for_rank

__all__ = ["TransferPlan", "plan_transfer", "plan_transfer_for_rank"]
