//! Models with quantized matrices.

use std::path::PathBuf;

use anyhow::{Result, bail, ensure};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use kv_cli::{Backend, ModelSource, Plain, Screen, dispatch};
use kv_models::{
    Error, LoadOptions, Loaded, QuantizeOptions, WeightDtype,
    kv_cubecl::{On, Target},
    kv_weights::{Activations, GroupSize, Quantize, Range, WeightFormat, check_device},
    load_with, save_quantized,
};

use crate::{run::Ended, stop::Stop};

/// Arguments of `kv-train quantize`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelSource,
    /// The format of all matrices but those below.
    #[arg(long, value_enum)]
    format: Kind,
    /// Numbers that share a scale, of int4 and int8: 32, 64 or 128 [default: 32]. Those of mxfp4
    /// are 32.
    #[arg(long)]
    group: Option<usize>,
    /// How the ranges of groups are chosen: the whole range, or that of least squared error.
    #[arg(long, value_enum, default_value = "whole")]
    range: RangeArg,
    /// Put the code of 0 of int4 and int8 in the middle, rather than where the range is best used.
    #[arg(long)]
    symmetric: bool,
    /// Another format for the projections of attention.
    #[arg(long, value_enum)]
    attention: Option<Kind>,
    /// Another format for the MLPs.
    #[arg(long, value_enum)]
    mlp: Option<Kind>,
    /// Another format for the token embedding and the head.
    #[arg(long, value_enum)]
    embedding: Option<Kind>,
    /// Write what other software loads: symmetric integers, and the embedding in floats.
    #[arg(long = "for", value_enum)]
    reader: Option<Reader>,
    /// The type of what stays in floats; auto is that of the model.
    #[arg(long, value_parser = dtypes(), default_value = "auto")]
    dtype: WeightDtype,
    /// Where matrices are restored.
    #[arg(long, value_enum, default_value = "flex")]
    backend: Backend,
    /// The folder to write, which must not be there.
    #[arg(long)]
    out: PathBuf,
}

/// The types of floats by name, so that a mistyped one is answered with the nearest.
fn dtypes() -> impl TypedValueParser<Value = WeightDtype> {
    PossibleValuesParser::new(["auto", "f32", "f16", "bf16"])
        .try_map(|name| name.parse::<WeightDtype>())
}

/// What matrices are stored as, but for their groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Kind {
    /// Integers of 4 bits.
    Int4,
    /// Integers of 8 bits.
    Int8,
    /// Floats of 4 bits, 32 of which share a power of two.
    Mxfp4,
    /// Not quantized.
    Float,
}

/// Software that reads fewer folders than this project does.
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
    /// All numbers of a group are in its range.
    Whole,
    /// Of some narrower ranges and the whole one, that of least squared error.
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
    /// Formats of attention, MLPs and embedding, and whether integers are symmetric.
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
                "format mxfp4: transformers reads it of gpt-oss models alone; choose int4 or int8, \
                 or leave out --for transformers"
            );
            ensure!(
                kinds[2] == Kind::Float,
                "embedding: transformers reads it in floats alone; leave out --embedding, or --for \
                 transformers"
            );
        }
        if !any(&[Kind::Int4, Kind::Int8]) {
            if let Some(group) = self.group.filter(|&group| group != 32) {
                bail!(
                    "group {group}: is of int4 and int8, and mxfp4 has groups of 32; leave it out, \
                     or choose another format"
                );
            }
            ensure!(!self.symmetric, "symmetric: is of int4 and int8, mxfp4 has no code of zero");
        }
        Ok((kinds, self.symmetric || transformers))
    }
}

pub(crate) fn run(args: &Args, stop: &Stop) -> Result<Ended> {
    let sizes = [GroupSize::G32, GroupSize::G64, GroupSize::G128];
    let group = args.group.unwrap_or(32);
    let Some(group) = sizes.into_iter().find(|size| size.numbers() == group) else {
        bail!("group {group}: must be 32, 64 or 128");
    };
    let (kinds, symmetric) = args.kinds()?;
    let formats = kinds.map(|kind| kind.format(group));
    ensure!(
        std::fs::symlink_metadata(&args.out).is_err(),
        "out {}: is there already; name a folder that is not, or remove it",
        args.out.display()
    );
    let options = QuantizeOptions::new(formats)
        .with_dtype(args.dtype)
        .with_quantize(Quantize::default().with_range(args.range.into()).with_symmetric(symmetric))
        .with_stop(&stop.asked);
    let ended = dispatch!(args.backend, Plain, run_on(args, options, stop))?;
    let integers = kinds.iter().any(|kind| matches!(kind, Kind::Int4 | Kind::Int8));
    let foreign = kinds.contains(&Kind::Mxfp4) || kinds[2] != Kind::Float;
    if ended == Ended::Finished && (foreign || integers && !symmetric) {
        kv_cli::note(
            "the transformers library does not load this folder: it reads integers without zero \
             points and embeddings in floats, as --for transformers writes them",
        );
    }
    Ok(ended)
}

fn run_on<T: Target>(args: &Args, quantize: QuantizeOptions<'_>, stop: &Stop) -> Result<Ended> {
    let path = args.model.find()?;
    let device = On::<T>::open()?;
    // Blocks of a file are restored a matrix at a time.
    let packed = check_device("", &device).is_ok().then_some(Activations::Exact);
    let options = LoadOptions::default().with_dtype(WeightDtype::Auto).with_packed(packed);
    let Loaded { model, tokenizer, cache, notes, .. } = load_with(&path, &device, options)?;
    kv_cli::notes(&notes);
    let options = quantize.with_cache(cache.as_ref());
    stop.begin_file();
    match save_quantized(&args.out, &model, &tokenizer?, options) {
        Err(Error::Interrupted) => {
            Screen::Out.line(Error::Interrupted)?;
            return Ok(Ended::Stopped);
        }
        saved => saved?,
    }
    let bytes = std::fs::metadata(args.out.join("model.safetensors"))?.len();
    Screen::Out.line(format_args!(
        "{} weights in {:.1} MB, {:.2} bits each, in {}",
        model.n_weights(),
        bytes as f64 / 1e6,
        8.0 * bytes as f64 / model.n_weights() as f64,
        args.out.display()
    ))?;
    Ok(Ended::Finished)
}
