"""All algorithms but GRPO (nanorl/grpo.py): a file for each family. Read in this order:

registry.py         the names of all parts, where they are and what they declare
option_groups.py    their options, by owner
spec.py             `AlgorithmSpec`, GRPO and all options together
recipes.py          those specs that have a name
modifier.py         how an option changes a stage of a batch

Advantages
advantages.py       of rollouts in their group (Dr.GRPO, RLOO, MaxRL, OPO, GDPO)
returns.py          of tokens, from what follows them (REINFORCE++, PPO's GAE)
turn_rewards.py     of turns
hierarchical.py     of turns in the same situation (HGPO)
pass_at_k.py        of groups that need one success among k
token_baseline.py   a baseline for each token (OTB)
reward_parts.py     the parts of a reward (GDPO)
overlong.py         a penalty on length (DAPO)
length_reward.py    a reward for short members of a group (Kimi k1.5)
truncation.py       what was cut off has no loss (DAPO)
dynamic_sampling.py which groups are trained on (DAPO)
own.py              functions of the user's

Losses
losses.py           REINFORCE, GSPO, SAPO, CISPO, decoupled PPO, the critic's
geometric_mean.py   one ratio for a sequence, with a clip of tokens (GMPO)
dppo.py             a trust region of probabilities
covariance.py       tokens chosen by their covariance (Clip-Cov, KL-Cov)
entropy_mask.py     tokens chosen by their entropy (the 80/20 rule)
distillation.py     a teacher's word; top_k.py: over its likeliest tokens
self_distillation.py  a teacher that reads hindsight (SDFT, SDPO)
observation.py      what tools answered (ECHO)
regularisers.py     a KL to the reference, and entropy
corrections.py      weights for tokens that another policy sampled
old_policy.py       other centres of the clip
divergences.py      how far two policies are apart
aggregation.py      other weights of tokens than the same for all
segments.py         masked means of whole sequences
batch_scoring.py    what other models say of a batch
"""
