//! The help of options that name a cache.

use kv_cubecl::KvFormat;
use kv_models::ModelCacheConfig;

/// Returns the help of an option that takes a cache or a policy, with every format there is. `lead`
/// says what the cache is for.
pub fn cache_help(lead: &str) -> String {
    format!(
        "{lead}: a short name kKvV, where K and V are {}, then any of -gN, -rN, -sN, -wN, -after, \
         -gflush, -stagger, -hadv, -hadk, -cN, -clip, -tN, -iN, -f16 and -bf16; or a \
         policy: {}, or a file of .json or .toml",
        KvFormat::names(),
        ModelCacheConfig::PRESETS.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use kv_cubecl::KvFormat;

    #[test]
    fn the_guide_has_the_table_of_formats() {
        let guide = include_str!("../../../docs/guide/cache-formats.md");
        let rows = KvFormat::markdown_rows();
        assert!(guide.contains(&rows), "docs/guide/cache-formats.md must contain:\n{rows}");
    }
}
