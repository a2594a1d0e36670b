//! The tensor names of DeepSeek-V4.

use crate::{checkpoint::Names, stack};

pub(super) const NAMES: Names = Names {
    family: "DeepSeek-V4",
    head: "head.weight",
    // The layers that predict more than one token ahead do not change the logits of the next.
    harmless: |name| name.starts_with("mtp."),
    ..stack::LLAMA_NAMES
};
