//! The arguments that choose how tokens are sampled.

use kv_models::Sampling;

#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct SamplingArgs {
    /// 0 picks the most likely token; higher values flatten the distribution.
    #[arg(long, default_value_t = 0.0)]
    temperature: f32,
    /// Number of most likely tokens to sample from; 0 for all.
    #[arg(long, default_value_t = 0)]
    top_k: usize,
    /// Sample from the smallest set of tokens with this much probability.
    #[arg(long, default_value_t = 1.0)]
    top_p: f32,
    /// Sample from tokens at least this much as likely as the most likely one.
    #[arg(long, default_value_t = 0.0)]
    min_p: f32,
    /// Above 1, makes tokens that occurred already less likely.
    #[arg(long, default_value_t = 1.0)]
    repeat_penalty: f32,
    /// Subtract this from the logit of a token for each time it occurred. On a GPU, the host
    /// computes penalties.
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    frequency_penalty: f32,
    /// Subtract this once from the logit of a token that occurred.
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    presence_penalty: f32,
    /// Number of last tokens the penalties look at, prompt included.
    #[arg(long, default_value_t = 64)]
    repeat_last: usize,
    /// Seed of the sampling. Each further prompt uses the next seed.
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

impl From<SamplingArgs> for Sampling {
    fn from(args: SamplingArgs) -> Self {
        Self {
            temperature: args.temperature,
            top_k: args.top_k,
            top_p: args.top_p,
            min_p: args.min_p,
            repeat_penalty: args.repeat_penalty,
            frequency_penalty: args.frequency_penalty,
            presence_penalty: args.presence_penalty,
            repeat_last: args.repeat_last,
            seed: args.seed,
        }
    }
}
