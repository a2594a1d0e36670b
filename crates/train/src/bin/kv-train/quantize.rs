//! `kv-train quantize`: writes models with quantized matrices.

use std::path::PathBuf;

use anyhow::{Result, bail, ensure};
use burn::module::Module;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use kv_cli::{Backend, ModelSource, Plain, Screen, dispatch};
use kv_eval::world::World;
use kv_models::{
    Error, LoadOptions, Loaded, QuantizeOptions, WeightDtype,
    kv_cubecl::{On, Target},
    kv_weights::{Activations, GroupSize, Quantize, Range, WeightFormat, check_device},
    load_with, save_quantized,
};

use crate::{run::Outcome, stop::Stop};

/// Arguments of `kv-train quantize`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelSource,
    /// Format of all matrices, unless another option overrides it.
    #[arg(long, value_enum)]
    format: Kind,
    /// Group size of int4 and int8: 32, 64 or 128 [default: 32]. The groups of mxfp4 are always 32.
    #[arg(long)]
    group: Option<usize>,
    /// Range of a group's codes: the whole range of its numbers, or the range of least squared
    /// error.
    #[arg(long, value_enum, default_value = "whole")]
    range: RangeArg,
    /// Use symmetric int4 and int8: the code of 0 is the middle one, not the one that fits the
    /// range.
    #[arg(long)]
    symmetric: bool,
    /// Format of the projections of attention.
    #[arg(long, value_enum)]
    attention: Option<Kind>,
    /// Format of the MLPs.
    #[arg(long, value_enum)]
    mlp: Option<Kind>,
    /// Format of the token embedding and the head, or of a world model's input and output.
    #[arg(long, value_enum)]
    embedding: Option<Kind>,
    /// Write a folder that other software loads: symmetric integers, and the embedding in float.
    #[arg(long = "for", value_enum)]
    reader: Option<Reader>,
    /// Type of everything that stays in float; auto keeps a language model's type, and is f16 for a
    /// world model.
    #[arg(long, value_parser = dtypes(), default_value = "auto")]
    dtype: WeightDtype,
    /// Backend on which matrices are restored.
    #[arg(long, value_enum, default_value = "flex")]
    backend: Backend,
    /// Folder to write; it must not exist.
    #[arg(long)]
    out: PathBuf,
}

/// Parses a float type by name, so that an error can suggest the nearest name.
fn dtypes() -> impl TypedValueParser<Value = WeightDtype> {
    PossibleValuesParser::new(["auto", "f32", "f16", "bf16"])
        .try_map(|name| name.parse::<WeightDtype>())
}

/// The format of a matrix, without its group size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Kind {
    /// 4-bit integers.
    Int4,
    /// 8-bit integers.
    Int8,
    /// 4-bit floats; each block of 32 shares a power of two.
    Mxfp4,
    /// Not quantized.
    Float,
}

/// Software that reads fewer formats than this project.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Reader {
    /// The transformers library with compressed-tensors.
    Transformers,
}

impl Kind {
    fn format(self, group: GroupSize) -> Option<WeightFormat> {
        match self {
            Self::Int4 => Some(WeightFormat::Int4(group)),
            Self::Int8 => Some(WeightFormat::Int8(group)),
            Self::Mxfp4 => Some(WeightFormat::Mxfp4),
            Self::Float => None,
        }
    }
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum RangeArg {
    /// The range of all numbers in the group.
    Whole,
    /// The whole range or a narrower one, whichever has the least squared error.
    LeastError,
}

impl From<RangeArg> for Range {
    fn from(range: RangeArg) -> Self {
        match range {
            RangeArg::Whole => Self::Whole,
            RangeArg::LeastError => Self::LeastError,
        }
    }
}

impl Args {
    /// Returns the formats of attention, MLPs and embedding, and whether integers are symmetric.
    fn kinds(&self) -> Result<([Kind; 3], bool)> {
        let transformers = self.reader == Some(Reader::Transformers);
        let embedding = if transformers { Kind::Float } else { self.format };
        let kinds = [
            self.attention.unwrap_or(self.format),
            self.mlp.unwrap_or(self.format),
            self.embedding.unwrap_or(embedding),
        ];
        ensure!(kinds != [Kind::Float; 3], "format float: nothing would be quantized");
        let any = |of: &[Kind]| kinds.iter().any(|kind| of.contains(kind));
        if transformers {
            ensure!(
                !any(&[Kind::Mxfp4]),
                "format mxfp4: transformers reads it only in gpt-oss models; choose int4 or int8, \
                 or leave out --for transformers"
            );
            ensure!(
                kinds[2] == Kind::Float,
                "embedding: transformers reads it only in float; leave out --embedding or --for \
                 transformers"
            );
        }
        if !any(&[Kind::Int4, Kind::Int8]) {
            if let Some(group) = self.group.filter(|&group| group != 32) {
                bail!(
                    "group {group}: mxfp4 has groups of 32; leave out --group, or use int4 or int8"
                );
            }
            ensure!(
                !self.symmetric,
                "symmetric: only int4 and int8 can be symmetric; leave out --symmetric"
            );
        }
        Ok((kinds, self.symmetric || transformers))
    }
}

pub(crate) fn run(args: &Args, stop: &Stop) -> Result<Outcome> {
    let sizes = [GroupSize::G32, GroupSize::G64, GroupSize::G128];
    let group = args.group.unwrap_or(32);
    let Some(group) = sizes.into_iter().find(|size| size.numbers() == group) else {
        bail!("group {group}: must be 32, 64 or 128");
    };
    let (kinds, symmetric) = args.kinds()?;
    let formats = kinds.map(|kind| kind.format(group));
    ensure!(
        std::fs::symlink_metadata(&args.out).is_err(),
        "out {}: already exists; choose another folder, or remove it",
        args.out.display()
    );
    let options = QuantizeOptions::new(formats)
        .with_dtype(args.dtype)
        .with_quantize(Quantize::default().with_range(args.range.into()).with_symmetric(symmetric))
        .with_stop(&stop.asked);
    let integers = kinds.iter().any(|kind| matches!(kind, Kind::Int4 | Kind::Int8));
    let foreign = kinds.contains(&Kind::Mxfp4) || kinds[2] != Kind::Float || integers && !symmetric;
    dispatch!(args.backend, Plain, run_on(args, options, foreign, stop))
}

/// Writes the model. `foreign` is whether only this project reads the folder of a language model.
fn run_on<T: Target>(
    args: &Args,
    quantize: QuantizeOptions<'_>,
    foreign: bool,
    stop: &Stop,
) -> Result<Outcome> {
    let path = args.model.find()?;
    let device = On::<T>::open()?;
    if World::is_in(&path) {
        ensure!(args.reader.is_none(), "for transformers: it has no world models; leave out --for");
        let world = World::load(&path, &device)?;
        stop.begin_file();
        let saved = world.save_quantized(&args.out, quantize);
        return finish(args, world.model.num_params(), saved);
    }
    // Weights stay packed if the device supports it, and are restored one matrix at a time.
    let packed = check_device("", &device).is_ok().then_some(Activations::Exact);
    let options = LoadOptions::default().with_dtype(WeightDtype::Auto).with_packed(packed);
    let Loaded { model, tokenizer, cache, notes, .. } = load_with(&path, &device, options)?;
    kv_cli::notes(&notes);
    let options = quantize.with_cache(cache.as_ref());
    stop.begin_file();
    let saved = save_quantized(&args.out, &model, &tokenizer?, options);
    let ended = finish(args, model.n_weights(), saved.map_err(Into::into))?;
    if ended == Outcome::Finished && foreign {
        kv_cli::note(
            "the transformers library does not load this folder: it needs symmetric integers and \
             embeddings in float; use --for transformers",
        );
    }
    Ok(ended)
}

/// Prints the size of the written weights.
fn finish(args: &Args, n_weights: usize, saved: kv_eval::Result<()>) -> Result<Outcome> {
    match saved {
        Err(kv_eval::Error::Model(Error::Interrupted)) => {
            Screen::Out.line(Error::Interrupted)?;
            return Ok(Outcome::Stopped);
        }
        saved => saved?,
    }
    let bytes = std::fs::metadata(args.out.join("model.safetensors"))?.len();
    Screen::Out.line(format_args!(
        "{n_weights} weights in {:.1} MB, {:.2} bits per weight, in {}",
        bytes as f64 / 1e6,
        8.0 * bytes as f64 / n_weights as f64,
        args.out.display()
    ))?;
    Ok(Outcome::Finished)
}
