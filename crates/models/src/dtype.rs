//! The float types of a model's weights.

use std::{fmt, str::FromStr};

use burn::tensor::DType;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// A float type of weights, or the type that they have already.
///
/// A model computes in the type of its weights. Activations between layers have this type; sums and
/// logits are f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum WeightDtype {
    /// 32-bit float.
    F32,
    /// IEEE half precision, up to 65504.
    F16,
    /// The upper half of an f32.
    Bf16,
    /// The existing type: the type of most elements of the file's matrices, or of the model that is
    /// saved. Quantized blocks of GGUF files count as f32.
    Auto,
}

impl WeightDtype {
    const ALL: [Self; 4] = [Self::F32, Self::F16, Self::Bf16, Self::Auto];

    /// Returns the short name, such as `bf16`.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Auto => "auto",
        }
    }

    /// Returns the type of tensors; `None` for [`Auto`](Self::Auto).
    pub fn dtype(self) -> Option<DType> {
        match self {
            Self::F32 => Some(DType::F32),
            Self::F16 => Some(DType::F16),
            Self::Bf16 => Some(DType::BF16),
            Self::Auto => None,
        }
    }

    /// Returns the variant for tensors of `dtype`; `None` if weights cannot have that type.
    pub fn of(dtype: DType) -> Option<Self> {
        Self::ALL.into_iter().find(|known| known.dtype() == Some(dtype))
    }
}

impl fmt::Display for WeightDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for WeightDtype {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let found = Self::ALL.into_iter().find(|dtype| dtype.name() == text);
        found.ok_or_else(|| {
            Error::argument("dtype", format!("{text:?}"), "must be f32, f16, bf16 or auto")
        })
    }
}
