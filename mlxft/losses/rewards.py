"""What preference runs log of each pair, under the names of Hugging Face's TRL."""

import mlx.core as mx

Metrics = dict[str, mx.array]


def reward_metrics(
    chosen_rewards: mx.array, rejected_rewards: mx.array, chosen_logps: mx.array, rejected_logps: mx.array
) -> Metrics:
    """Returns each pair's metrics, (P,) float32 and without gradient; a pair counts 1 in each's mean.

    rewards/chosen, rewards/rejected; rewards/margins: their difference; rewards/accuracies: 1 where the
    chosen answer's is the greater; logps/chosen, logps/rejected: in nats, what the loss was given.
    """
    rewards = [mx.stop_gradient(reward.astype(mx.float32)) for reward in (chosen_rewards, rejected_rewards)]
    return {
        "rewards/chosen": rewards[0],
        "rewards/rejected": rewards[1],
        "rewards/margins": rewards[0] - rewards[1],
        "rewards/accuracies": (rewards[0] > rewards[1]).astype(mx.float32),
        "logps/chosen": mx.stop_gradient(chosen_logps.astype(mx.float32)),
        "logps/rejected": mx.stop_gradient(rejected_logps.astype(mx.float32)),
    }
