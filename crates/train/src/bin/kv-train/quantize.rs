//! Models with quantized matrices.

use std::{path::PathBuf, str::FromStr};

use anyhow::{Result, bail, ensure};
use kv_cli::{Backend, ModelSource, Plain, Screen, dispatch};
use kv_models::{
    LoadOptions, Loaded, QuantizeOptions, WeightDtype,
    kv_cubecl::{On, Target},
    kv_weights::{Activations, GroupSize, Quantize, Range, WeightFormat, check_device},
    load_with, save_quantized,
};

/// Arguments of `kv-train quantize`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelSource,
    /// The format of all matrices but those below: int4, int8, mxfp4 or float.
    #[arg(long)]
    format: Kind,
    /// Numbers that share a scale, of int4 and int8: 32, 64 or 128. Those of mxfp4 are 32.
    #[arg(long, default_value_t = 32)]
    group: usize,
    /// How the ranges of groups are chosen: the whole range, or that of least squared error.
    #[arg(long, value_enum, default_value = "whole")]
    range: RangeArg,
    /// Put the code of 0 of int4 and int8 in the middle, rather than where the range is best used.
    #[arg(long)]
    symmetric: bool,
    /// Another format for the projections of attention.
    #[arg(long)]
    attention: Option<Kind>,
    /// Another format for the MLPs.
    #[arg(long)]
    mlp: Option<Kind>,
    /// Another format for the token embedding and the head.
    #[arg(long)]
    embedding: Option<Kind>,
    /// The type of what stays in floats: f32, f16, bf16, or auto for that of the model.
    #[arg(long, default_value = "auto")]
    dtype: WeightDtype,
    /// Where matrices are restored.
    #[arg(long, value_enum, default_value = "flex")]
    backend: Backend,
    /// The folder to write, which must not be there.
    #[arg(long)]
    out: PathBuf,
}

/// What matrices are stored as, but for their groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Int4,
    Int8,
    Mxfp4,
    Float,
}

impl FromStr for Kind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "int4" => Ok(Self::Int4),
            "int8" => Ok(Self::Int8),
            "mxfp4" => Ok(Self::Mxfp4),
            "float" => Ok(Self::Float),
            _ => Err("must be int4, int8, mxfp4 or float".into()),
        }
    }
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

pub(crate) fn run(args: &Args) -> Result<()> {
    let sizes = [GroupSize::G32, GroupSize::G64, GroupSize::G128];
    let Some(group) = sizes.into_iter().find(|size| size.numbers() == args.group) else {
        bail!("group {}: must be 32, 64 or 128", args.group);
    };
    let kinds = [args.attention, args.mlp, args.embedding].map(|kind| kind.unwrap_or(args.format));
    let formats = kinds.map(|kind| kind.format(group));
    ensure!(formats != [None; 3], "format float: nothing would be quantized");
    ensure!(
        std::fs::symlink_metadata(&args.out).is_err(),
        "out {}: is there already",
        args.out.display()
    );
    let options = QuantizeOptions::new(formats).with_dtype(args.dtype).with_quantize(
        Quantize::default().with_range(args.range.into()).with_symmetric(args.symmetric),
    );
    dispatch!(args.backend, Plain, run_on(args, options))
}

fn run_on<T: Target>(args: &Args, quantize: QuantizeOptions<'_>) -> Result<()> {
    let path = args.model.find()?;
    let device = On::<T>::open()?;
    // Blocks of a file are restored a matrix at a time.
    let packed = check_device("", &device).is_ok().then_some(Activations::Exact);
    let options = LoadOptions::default().with_dtype(WeightDtype::Auto).with_packed(packed);
    let Loaded { model, tokenizer, cache, notes, .. } = load_with(&path, &device, options)?;
    kv_cli::notes(&notes);
    let options = quantize.with_cache(cache.as_ref());
    save_quantized(&args.out, &model, &tokenizer?, options)?;
    let bytes = std::fs::metadata(args.out.join("model.safetensors"))?.len();
    Screen::Out.line(format_args!(
        "{} weights in {:.1} MB, {:.2} bits each, in {}",
        model.n_weights(),
        bytes as f64 / 1e6,
        8.0 * bytes as f64 / model.n_weights() as f64,
        args.out.display()
    ))?;
    Ok(())
}
