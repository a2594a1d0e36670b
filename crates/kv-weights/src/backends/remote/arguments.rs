//! Rules of arguments, which a server checks when it reads them.

use kv_device::remote::Argument;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::{
    Activations, ExpertSelection, FusedPlan, Gate, PackedLayout, WeightFormat, fused::MOST_PARTS,
};

impl Argument for Activations {}
impl Argument for Gate {}

/// The number of matrices of a fused product.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) enum PartCount {
    One,
    Two,
    Three,
}

impl Argument for PartCount {}

/// The inputs from which a [`PackedLayout`] is computed, with the format by its name.
#[derive(Serialize, Deserialize)]
struct LayoutInputs {
    format: String,
    shape: [usize; 2],
}

impl Serialize for PackedLayout {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let format = self.format().name().to_string();
        LayoutInputs { format, shape: self.shape() }.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for PackedLayout {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let LayoutInputs { format, shape } = LayoutInputs::deserialize(deserializer)?;
        let format: WeightFormat = format.parse().map_err(de::Error::custom)?;
        Self::new(format, shape).map_err(de::Error::custom)
    }
}

impl Argument for PackedLayout {}

impl Argument for ExpertSelection {
    fn check(&self) -> Result<(), String> {
        let Self { stride, shared, .. } = *self;
        for (field, value) in [("stride", stride), ("shared", shared)] {
            if value == 0 || value > 1 << 32 {
                return Err(format!("{field} {value}: must be 1 to 2^32"));
            }
        }
        Ok(())
    }
}

impl Argument for FusedPlan {
    fn check(&self) -> Result<(), String> {
        let Some((first, others)) = self.parts.split_first() else {
            return Err("parts 0: must be at least 1".to_string());
        };
        let n = self.parts.len();
        if n > MOST_PARTS {
            return Err(format!("parts {n}: must be at most {MOST_PARTS}"));
        }
        let alike = |part: &PackedLayout| {
            part.format() == first.format() && part.columns() == first.columns()
        };
        if !others.iter().all(alike) {
            return Err("parts: must have one format and width".to_string());
        }
        let halves = match others {
            [] => first.rows().is_multiple_of(2),
            [up] => up == first,
            _ => false,
        };
        match self.gate.is_some() && !halves {
            true => Err("gate: needs one matrix, or two of equal size".to_string()),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_that_break_a_rule_are_refused() {
        let layout = |rows| PackedLayout::new(WeightFormat::Q4_0, [rows, 64]).unwrap();
        let plan = |parts: Vec<usize>, gate| FusedPlan {
            parts: parts.into_iter().map(layout).collect(),
            activations: Activations::Exact,
            gate,
            epsilon: 1e-5,
            plus_one: false,
        };
        let gate = Some(Gate::Silu);
        for (good, gate) in
            [(vec![3], None), (vec![4], gate), (vec![3, 3], gate), (vec![1, 2, 3], None)]
        {
            assert_eq!(plan(good, gate).check(), Ok(()));
        }
        for (bad, gate) in [(vec![], None), (vec![3], gate), (vec![3, 4], gate), (vec![1; 4], None)]
        {
            assert!(plan(bad, gate).check().is_err());
        }
    }
}
