//! `kv-eval world --search`.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use kv_cli::{MemorySize, Screen, count_bar};
use kv_cubecl::{KvCacheConfig, KvFormat, On, Side, Target};
use kv_eval::world::{RolloutPlan, Truth, World, WorldFound, WorldSearch, search};
use kv_models::ModelCacheConfig;
use kv_report::Table;

use crate::{arguments::quantized_format, policy_file::PolicyFile};

/// Games whose predictions a search compares, and their frames after the true ones.
const GAMES: u64 = 4;
const FRAMES: usize = 24;

#[derive(Debug, clap::Args)]
pub(super) struct SearchArgs {
    /// Find the best policy within this byte budget for the caches of one game, such as 300K, and
    /// compare it with the caches. The search uses games after those that are played.
    #[arg(long = "search", value_name = "SIZE", requires = "policy")]
    bytes: Option<MemorySize>,
    /// Format to choose from for each side of each layer, in addition to float; repeatable.
    #[arg(long = "format", value_parser = quantized_format, requires = "bytes",
        default_values = ["int8", "4"])]
    formats: Vec<KvFormat>,
    /// Cache that gives quantized layers their options except the formats: groups, residual,
    /// hadamard and float type.
    #[arg(long, requires = "bytes", default_value = "k4v4-r32")]
    base: KvCacheConfig,
    /// Write the policy of --search into this file, .toml or .json. It is named after the file.
    #[arg(long, value_name = "FILE", requires = "bytes")]
    policy: Option<PathBuf>,
}

impl SearchArgs {
    pub(super) fn policy(&self) -> Option<&Path> {
        self.policy.as_deref()
    }

    /// Returns the name of the policy, the stem of its file's name.
    fn name(&self) -> &str {
        let name = self.policy.as_deref().and_then(Path::file_stem);
        name.and_then(|name| name.to_str()).unwrap_or_default()
    }

    /// Returns the budget and the file, which is checked before anything is loaded.
    pub(super) fn open(&self) -> Result<Option<(MemorySize, PolicyFile)>> {
        let (Some(bytes), Some(path)) = (self.bytes, &self.policy) else { return Ok(None) };
        ModelCacheConfig::from(self.base).with_name(self.name())?;
        Ok(Some((bytes, PolicyFile::open("policy", path)?)))
    }

    /// Returns a cache with the formats to choose from, for checks of what they need.
    pub(super) fn candidates(&self) -> Vec<KvCacheConfig> {
        let formats = self.formats.iter().filter(|_| self.bytes.is_some());
        formats.map(|&format| self.base.with_formats(format, format)).collect()
    }

    /// Returns the number of games of a search and of their frames, true ones included.
    pub(super) fn games(&self, plan: &RolloutPlan) -> Option<[u64; 2]> {
        self.bytes.map(|_| [GAMES, (plan.context + FRAMES) as u64])
    }

    /// Searches, prints the result, and writes the policy.
    pub(super) fn search<T: Target>(
        &self,
        (bytes, file): (MemorySize, PolicyFile),
        device: &On<T>,
        world: &World,
        plan: &RolloutPlan,
        first_seed: u64,
        screen: &Screen,
    ) -> Result<ModelCacheConfig> {
        let Some(end) = first_seed.checked_add(GAMES) else {
            bail!("first-seed: the search needs {GAMES} more seeds after the games");
        };
        let asked = WorldSearch {
            base: self.base,
            formats: self.formats.clone(),
            bytes: usize::try_from(bytes.0).unwrap_or(usize::MAX),
            name: self.name().into(),
        };
        let truth = Truth::new(world.maze(), first_seed..end, plan.context + FRAMES);
        let plan = RolloutPlan { inspect: None, ..*plan };
        let bar = count_bar();
        let found = search(device, world, &truth, &plan, &asked, |done, of| {
            bar.set_length(of as u64);
            bar.set_position(done as u64);
        });
        bar.finish_and_clear();
        let found = found?;
        file.write(&found.policy)?;
        let WorldFound { bytes, predicted, .. } = found;
        screen.line(format_args!(
            "{}: {:.0} KB a game; predictions should be off by {:.2}%",
            self.name(),
            bytes as f64 / 1e3,
            100.0 * predicted
        ))?;
        screen.print(sensitivities(&found))?;
        Ok(found.policy)
    }
}

/// Lists the errors in percent by layer, and by side and format.
fn sensitivities(found: &WorldFound) -> Table {
    let all = &found.sensitivities;
    let of = |side, format| all.iter().filter(move |one| one.side == side && one.format == format);
    let mut formats: Vec<KvFormat> = vec![];
    for one in all.iter().filter(|one| one.layer == 0 && one.side == Side::Keys) {
        formats.push(one.format);
    }
    let columns: Vec<(Side, KvFormat)> = Side::BOTH
        .into_iter()
        .flat_map(|side| formats.iter().map(move |&format| (side, format)))
        .collect();
    let header = columns.iter().map(|(side, format)| format!("{side} as {format}, %"));
    let mut table = Table::new(["layer".to_string()].into_iter().chain(header));
    let layers = all.iter().map(|one| one.layer + 1).max().unwrap_or(0);
    for layer in 0..layers {
        let cells = columns.iter().map(|&(side, format)| {
            let error = of(side, format).find(|one| one.layer == layer);
            error.map_or(String::new(), |one| format!("{:.3}", 100.0 * one.velocity_error))
        });
        table.push([layer.to_string()].into_iter().chain(cells).collect::<Vec<_>>());
    }
    table
}
