//! Multiple-choice and log-likelihood tasks with each cache.
//!
//! Texts, tokens and metrics follow lm-evaluation-harness (EleutherAI, commit `4e7e0d4` of
//! 2026-08-21), so that a float cache gives the numbers of its backend `hf`, up to rounding.

mod encode;
mod fields;
mod formats;
mod item;
mod python;
mod read;
mod report;
mod score;

pub use encode::TaskPlan;
pub use formats::TaskFormat;
pub use item::{TaskItem, TaskTarget};
pub use read::Task;
pub use report::{Estimate, TaskDifference, TaskReport, TaskScore};
pub use score::{ItemScore, score_tasks};
