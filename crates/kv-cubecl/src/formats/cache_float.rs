//! [`CacheFloat`]: the float types of sinks, residual and sides that are not quantized.

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
    /// Returns the type's name in short names of configurations and in files.
    pub fn name(self) -> &'static str {
        self.format().name()
    }

    /// Returns the type of tensors.
    pub fn dtype(self) -> DType {
        self.format().dtype()
    }

    /// Returns the number of bytes per element.
    pub fn size(self) -> usize {
        self.dtype().size()
    }

    /// Returns the number as which `x` is stored: the nearest number of this type.
    ///
    /// If the type has a smaller range than f32, larger numbers and infinities become its largest
    /// number. NaN stays NaN.
    pub fn round(self, x: f32) -> f32 {
        self.format().round(x)
    }

    /// [Rounds](Self::round) every element.
    #[cfg(feature = "flex")]
    pub(crate) fn round_all(self, row: &mut [f32]) {
        self.format().round_all(row);
    }

    /// Returns whether the type has a smaller range than f32.
    #[cfg(feature = "cube")]
    pub(crate) fn saturates(self) -> bool {
        self.round(f32::INFINITY).is_finite()
    }

    /// Returns the type in kernels.
    #[cfg(feature = "cube")]
    pub(crate) fn elem(self) -> cubecl::ir::ElemType {
        cubecl::ir::ElemType::Float(self.format().kind())
    }

    /// Fills `out` with the elements of a tensor's `bytes` from element `start` on.
    #[cfg(feature = "flex")]
    pub(crate) fn read(self, bytes: &[u8], start: usize, out: &mut [f32]) {
        self.format().read(bytes, start, out);
    }

    /// Stores rows in a tensor. Each row comes with the index of its first element.
    #[cfg(feature = "flex")]
    pub(crate) fn write<'a>(
        self,
        tensor: &mut FlexTensor,
        mut rows: impl Iterator<Item = (usize, &'a [f32])>,
    ) {
        self.format().write(tensor, &mut rows);
    }
}
