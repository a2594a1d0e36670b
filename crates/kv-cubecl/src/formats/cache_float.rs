//! The float types of a cache: sinks, residual, and sides that are not quantized.

use burn::tensor::DType;
#[cfg(feature = "flex")]
use burn_flex::FlexTensor;
use serde::{Deserialize, Serialize};

use super::{float::FloatFormat, table::floats};

macro_rules! cache_float {
    ($($(#[$attribute:meta])* $module:ident::$Float:ident,)+) => {
        /// Storage type of everything that stays in float: sinks, residual, unquantized sides.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[serde(rename_all = "lowercase")]
        #[non_exhaustive]
        pub enum CacheFloat {
            $($(#[$attribute])* $Float,)+
        }

        impl CacheFloat {
            /// All float types.
            pub const ALL: &[Self] = &[$(Self::$Float),+];

            fn format(self) -> &'static dyn FloatFormat {
                match self {
                    $(Self::$Float => &super::$module::$Float,)+
                }
            }
        }
    };
}

floats!(cache_float);

impl CacheFloat {
    /// What it is called in the short names of configurations, and in files.
    pub fn name(self) -> &'static str {
        self.format().name()
    }

    /// The type of its tensors.
    pub fn dtype(self) -> DType {
        self.format().dtype()
    }

    /// Bytes per element.
    pub fn size(self) -> usize {
        self.dtype().size()
    }

    /// What `x` is stored as: the nearest number of the format. Where its range is less than that of f32,
    /// larger numbers and infinities become the largest that it has. NaN stays NaN.
    pub fn round(self, x: f32) -> f32 {
        self.format().round(x)
    }

    /// [`round`](Self::round) of each.
    #[cfg(feature = "flex")]
    pub(crate) fn round_all(self, row: &mut [f32]) {
        self.format().round_all(row);
    }

    /// Whether its range is less than that of f32.
    #[cfg(feature = "cube")]
    pub(crate) fn saturates(self) -> bool {
        self.round(f32::INFINITY).is_finite()
    }

    /// Its type in kernels.
    #[cfg(feature = "cube")]
    pub(crate) fn elem(self) -> cubecl::ir::ElemType {
        cubecl::ir::ElemType::Float(self.format().kind())
    }

    /// Fills `out` with elements of a tensor's `bytes`, from `start` on, in f32.
    #[cfg(feature = "flex")]
    pub(crate) fn read(self, bytes: &[u8], start: usize, out: &mut [f32]) {
        self.format().read(bytes, start, out);
    }

    /// Stores rows in a tensor, each from an element on.
    #[cfg(feature = "flex")]
    pub(crate) fn write<'a>(
        self,
        tensor: &mut FlexTensor,
        mut rows: impl Iterator<Item = (usize, &'a [f32])>,
    ) {
        self.format().write(tensor, &mut rows);
    }
}
