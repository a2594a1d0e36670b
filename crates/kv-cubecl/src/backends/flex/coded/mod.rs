//! Products of many float rows with the codes of packed tokens, which are not restored.

#[cfg(target_arch = "x86_64")]
mod amx;

#[cfg(target_arch = "x86_64")]
pub(super) use amx::Coded;
#[cfg(not(target_arch = "x86_64"))]
pub(super) use nowhere::Coded;

/// For processors without such products.
#[cfg(not(target_arch = "x86_64"))]
mod nowhere {
    use crate::formats::flex::PackedRun;

    pub(in super::super) enum Coded {}

    impl Coded {
        pub(in super::super) fn new(_query: &[f32], _head_dim: usize, _scale: f32) -> Option<Self> {
            None
        }

        pub(in super::super) fn score(
            &mut self,
            _keys: &PackedRun<'_>,
            _scores: &mut [f32],
            _n: usize,
        ) {
            match *self {}
        }

        pub(in super::super) fn add(
            &mut self,
            _values: &PackedRun<'_>,
            _weights: &[f32],
            _n: usize,
            _o: &mut [f32],
        ) {
            match *self {}
        }
    }
}
