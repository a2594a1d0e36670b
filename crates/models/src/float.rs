//! The float types of weights, and conversions of their bytes.

use std::path::Path;

use burn::tensor::{DType, Element};
use half::{bf16, f16};

use crate::error::Error;

/// A float type of weights.
pub(crate) trait Float: Element {
    const NAME: &str;
    const DTYPE: DType;
    const MAX: f32;

    fn from_le(bytes: &[u8]) -> Self;
    fn round(value: f32) -> Self;
    fn widen(self) -> f32;
    fn put_le(self, bytes: &mut Vec<u8>);
}

macro_rules! float {
    ($type:ty, $name:literal, $dtype:ident, $max:expr, $round:expr, $widen:expr) => {
        impl Float for $type {
            const NAME: &str = $name;
            const DTYPE: DType = DType::$dtype;
            const MAX: f32 = $max;

            fn from_le(bytes: &[u8]) -> Self {
                let mut own = [0; size_of::<Self>()];
                own.copy_from_slice(bytes);
                Self::from_le_bytes(own)
            }

            fn round(value: f32) -> Self {
                ($round)(value)
            }

            fn widen(self) -> f32 {
                ($widen)(self)
            }

            fn put_le(self, bytes: &mut Vec<u8>) {
                bytes.extend_from_slice(&self.to_le_bytes());
            }
        }
    };
}

float!(f32, "f32", F32, Self::MAX, |value| value, |value| value);
float!(f16, "f16", F16, Self::MAX.to_f32_const(), Self::from_f32, Self::to_f32);
float!(bf16, "bf16", BF16, Self::MAX.to_f32_const(), Self::from_f32, Self::to_f32);

/// Evaluates `$body` with `$T` as an alias of the [`Float`] type of `$dtype`, or `$other` if there
/// is none.
macro_rules! with_float {
    ($dtype:expr, $T:ident => $body:expr, else $other:expr) => {
        match $dtype {
            ::burn::tensor::DType::F32 => {
                type $T = f32;
                $body
            }
            ::burn::tensor::DType::F16 => {
                type $T = ::half::f16;
                $body
            }
            ::burn::tensor::DType::BF16 => {
                type $T = ::half::bf16;
                $body
            }
            _ => $other,
        }
    };
}
pub(crate) use with_float;

/// A defect in the bytes of a tensor.
#[derive(Debug)]
pub(crate) enum Flaw {
    /// The type is not a float of 16 or 32 bits.
    Type(DType),
    /// The first value that is NaN or infinite.
    NonFinite { index: usize, value: f32 },
    /// The first value beyond the largest of the type that it is rounded to.
    TooLarge { index: usize, value: f32, name: &'static str, max: f32 },
}

impl Flaw {
    /// Shifts the index by the `n` values that precede these.
    pub(crate) fn after(self, n: usize) -> Self {
        match self {
            Self::NonFinite { index, value } => Self::NonFinite { index: index + n, value },
            Self::TooLarge { index, value, name, max } => {
                Self::TooLarge { index: index + n, value, name, max }
            }
            other => other,
        }
    }

    /// Returns the error for `tensor` of the file at `path`.
    pub(crate) fn of(self, path: &Path, tensor: &str) -> Error {
        let (path, tensor) = (path.into(), tensor.into());
        let why = match self {
            Self::NonFinite { index, value } => {
                return Error::NonFinite { path, tensor, value, index };
            }
            Self::Type(dtype) => format!("type {dtype:?} is not one of f32, f16, bf16"),
            Self::TooLarge { index, value, name, max } => {
                format!("holds {value} at element {index}, {name} weights must be at most {max}")
            }
        };
        Error::Tensor { path, tensor, why }
    }
}

/// Appends the values in `bytes`, little-endian of type `from`, rounded to the type of `to`. Values
/// of that type already are copied exactly.
pub(crate) fn append<T: Float>(bytes: &[u8], from: DType, to: &mut Vec<T>) -> Result<(), Flaw> {
    with_float!(from, S => append_from::<S, T>(bytes, to), else Err(Flaw::Type(from)))
}

fn append_from<S: Float, T: Float>(bytes: &[u8], to: &mut Vec<T>) -> Result<(), Flaw> {
    let values = bytes.chunks_exact(size_of::<S>()).map(S::from_le);
    let fits = |value: S| value.widen().abs() <= T::MAX; // not so for NaN
    if let Some((index, value)) = values.clone().enumerate().find(|(_, value)| !fits(*value)) {
        let (value, name, max) = (value.widen(), T::NAME, T::MAX);
        return Err(match value.is_finite() {
            true => Flaw::TooLarge { index, value, name, max },
            false => Flaw::NonFinite { index, value },
        });
    }
    match S::DTYPE == T::DTYPE {
        true => to.extend(bytes.chunks_exact(size_of::<T>()).map(T::from_le)),
        false => to.extend(values.map(|value| T::round(value.widen()))),
    }
    Ok(())
}
