//! Keys and values: the two sides of a cache.

use core::{
    fmt,
    ops::{Index, IndexMut},
};

use serde::{Deserialize, Serialize};

/// Side of a cache: keys or values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// The keys.
    Keys,
    /// The values.
    Values,
}

impl Side {
    /// Both, in the order in which a cache stores them.
    pub const BOTH: [Self; 2] = [Self::Keys, Self::Values];

    /// Returns the name of the side, and of the field of its format in configurations.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Keys => "keys",
            Self::Values => "values",
        }
    }
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One of something for the keys and one for the values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sides<T> {
    /// Item of the keys.
    pub keys: T,
    /// Item of the values.
    pub values: T,
}

impl<T> Sides<T> {
    /// Calls `make` for each side.
    pub fn from_fn(mut make: impl FnMut(Side) -> T) -> Self {
        let [keys, values] = Side::BOTH.map(&mut make);
        Self { keys, values }
    }

    /// `f` of each side.
    pub fn map<U>(self, f: impl FnMut(T) -> U) -> Sides<U> {
        let [keys, values] = [self.keys, self.values].map(f);
        Sides { keys, values }
    }

    /// Keys, then values.
    pub fn into_array(self) -> [T; 2] {
        [self.keys, self.values]
    }
}

/// Uses the same item for both sides.
impl<T: Copy> From<T> for Sides<T> {
    fn from(both: T) -> Self {
        Self { keys: both, values: both }
    }
}

impl<T> Index<Side> for Sides<T> {
    type Output = T;

    fn index(&self, side: Side) -> &T {
        match side {
            Side::Keys => &self.keys,
            Side::Values => &self.values,
        }
    }
}

impl<T> IndexMut<Side> for Sides<T> {
    fn index_mut(&mut self, side: Side) -> &mut T {
        match side {
            Side::Keys => &mut self.keys,
            Side::Values => &mut self.values,
        }
    }
}
