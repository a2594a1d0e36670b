//! `kv-eval twin`: a float cache beside a quantized one.

use anyhow::Result;
use kv_cli::{Plain, dispatch, token_bar};
use kv_cubecl::{KvCacheConfig, On, Target};
use kv_eval::twin;
use kv_models::ModelCacheConfig;

use crate::{
    arguments::{JsonArgs, TextArgs, TextIds},
    common::{ModelArgs, Weights, note_policies, write_json},
    loading::Need,
    source::{self, Fitting, Source},
};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    on: ModelArgs,
    #[command(flatten)]
    text: TextArgs,
    /// The cache to put beside the float one, or a policy: safe, balanced, small, or a file of .json or .toml.
    #[arg(long)]
    cache: ModelCacheConfig,
    /// Tokens to pass, one at a time; at most so many as the model has positions.
    #[arg(long, default_value_t = 256)]
    tokens: usize,
    /// Stop after the first token whose distribution diverges further from the float cache's than this, in nats.
    #[arg(long, allow_negative_numbers = true)]
    stop: Option<f64>,
    #[command(flatten)]
    json: JsonArgs,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    dispatch!(args.on.backend, Plain, run_on(args))
}

fn run_on<T: Target>(args: &Args) -> Result<()> {
    let device = On::<T>::open()?;
    let (screen, json) = args.json.open()?;
    let need = Need::new([KvCacheConfig::float().into(), args.cache.clone()], args.tokens);
    let Fitting { source: Source { model, tokenizer, .. }, .. } =
        source::load(&args.on, Weights::Packed, need, &device)?;
    note_policies([&args.cache], model.spec());
    let TextIds { ids, bos, .. } = args.text.read(&tokenizer, Some(args.tokens))?;
    let mut ids: Vec<u32> = bos.into_iter().chain(ids).collect();
    ids.truncate(args.tokens);
    let bar = token_bar(ids.len());
    let twin = twin(&device, &model, &ids, &args.cache, args.stop, |_| bar.inc(1));
    bar.finish_and_clear();
    let twin = twin?;
    let json = json.map_or(Ok(()), |file| write_json(file, &twin));
    screen.print(&twin)?;
    json
}
