//! Style sheet, scripts and libraries, which are part of the program.

use std::io::Write as _;
use std::sync::OnceLock;

use axum::body::Body;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use stoker_storage::hash::sha256_hex;

/// A file below `/assets/`.
struct Asset {
    path: &'static str,
    bytes: &'static [u8],
    /// Compressed bytes and the hash, computed when they are first needed.
    derived: OnceLock<(Vec<u8>, String)>,
}

macro_rules! assets {
    ($($path:literal => $file:literal),* $(,)?) => {
        [$(Asset {
            path: $path,
            bytes: include_bytes!(concat!("../", $file)),
            derived: OnceLock::new(),
        }),*]
    };
}

static ASSETS: [Asset; 45] = assets![
    "app.js" => "assets/app.js",
    "data.js" => "assets/data.js",
    "dom.js" => "assets/dom.js",
    "export.js" => "assets/export.js",
    "format.js" => "assets/format.js",
    "host.js" => "assets/host.js",
    "keyboard.js" => "assets/keyboard.js",
    "live.js" => "assets/live.js",
    "logs.js" => "assets/logs.js",
    "options.js" => "assets/options.js",
    "retry.js" => "assets/retry.js",
    "select.js" => "assets/select.js",
    "state.js" => "assets/state.js",
    "style.css" => "assets/style.css",
    "theme.js" => "assets/theme.js",
    "times.js" => "assets/times.js",
    "tooltip.js" => "assets/tooltip.js",
    "touch.js" => "assets/touch.js",
    "plots/chart.js" => "assets/plots/chart.js",
    "plots/colors.js" => "assets/plots/colors.js",
    "plots/compare.js" => "assets/plots/compare.js",
    "plots/curves.js" => "assets/plots/curves.js",
    "plots/heatmap.js" => "assets/plots/heatmap.js",
    "plots/history.js" => "assets/plots/history.js",
    "plots/ladder-parts.js" => "assets/plots/ladder-parts.js",
    "plots/ladder.js" => "assets/plots/ladder.js",
    "plots/lines.js" => "assets/plots/lines.js",
    "plots/panels.js" => "assets/plots/panels.js",
    "plots/parallel-canvas.js" => "assets/plots/parallel-canvas.js",
    "plots/parallel-sliders.js" => "assets/plots/parallel-sliders.js",
    "plots/parallel-text.js" => "assets/plots/parallel-text.js",
    "plots/parallel.js" => "assets/plots/parallel.js",
    "plots/pareto.js" => "assets/plots/pareto.js",
    "plots/profiler.js" => "assets/plots/profiler.js",
    "plots/scatter.js" => "assets/plots/scatter.js",
    "plots/scene.js" => "assets/plots/scene.js",
    "plots/strips.js" => "assets/plots/strips.js",
    "plots/svg.js" => "assets/plots/svg.js",
    "plots/ticks.js" => "assets/plots/ticks.js",
    "plots/timeline.js" => "assets/plots/timeline.js",
    "plots/trial.js" => "assets/plots/trial.js",
    "vendor/echarts.min.js" => "vendor/echarts.min.js",
    "vendor/htmx.min.js" => "vendor/htmx.min.js",
    "vendor/uPlot.iife.min.js" => "vendor/uPlot.iife.min.js",
    "vendor/uPlot.min.css" => "vendor/uPlot.min.css",
];

impl Asset {
    fn derived(&self) -> &(Vec<u8>, String) {
        self.derived.get_or_init(|| {
            let mut encoder =
                flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
            // Ignore the result: writing to memory cannot fail.
            let _ = encoder.write_all(self.bytes);
            let hash = sha256_hex(self.bytes);
            (encoder.finish().unwrap_or_default(), format!("\"{}\"", &hash[..16]))
        })
    }

    fn content_type(&self) -> &'static str {
        match self.path.rsplit('.').next() {
            Some("js") => "text/javascript; charset=utf-8",
            Some("css") => "text/css; charset=utf-8",
            Some("svg") => "image/svg+xml",
            _ => "application/octet-stream",
        }
    }
}

/// Returns the file at a path below `/assets/`.
pub(crate) fn serve(path: &str, headers: &HeaderMap) -> Response {
    let Some(asset) = ASSETS.iter().find(|asset| asset.path == path) else {
        return StatusCode::NOT_FOUND.into_response();
    };
    let (compressed, tag) = asset.derived();
    let contains = |name: header::HeaderName, text: &str| {
        headers.get(name).and_then(|value| value.to_str().ok()).is_some_and(|of| of.contains(text))
    };
    // The browser asks each time, so that a new version of Stoker is used at once.
    let common = [(header::ETAG, tag.as_str()), (header::CACHE_CONTROL, "no-cache")];
    if contains(header::IF_NONE_MATCH, tag) {
        return (StatusCode::NOT_MODIFIED, common).into_response();
    }
    let kind = [(header::CONTENT_TYPE, asset.content_type()), (header::VARY, "Accept-Encoding")];
    match contains(header::ACCEPT_ENCODING, "gzip") {
        true => {
            let encoding = [(header::CONTENT_ENCODING, "gzip")];
            (common, kind, encoding, Body::from(compressed.as_slice())).into_response()
        }
        false => (common, kind, Body::from(asset.bytes)).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// SHA-256 of unmodified releases of the libraries, as in `vendor/README.md`.
    #[test]
    fn libraries_are_unmodified_releases() {
        let readme = include_str!("../vendor/README.md");
        for asset in ASSETS.iter().filter(|asset| asset.path.starts_with("vendor/")) {
            let name = asset.path.trim_start_matches("vendor/");
            let hash = sha256_hex(asset.bytes);
            assert!(readme.contains(name), "vendor/README.md lacks {name}");
            assert!(readme.contains(&hash), "{name} has the hash {hash}");
        }
    }

    #[test]
    fn every_file_is_served() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/assets");
        for folder in [folder.to_owned(), format!("{folder}/plots")] {
            for entry in std::fs::read_dir(&folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_file() {
                    let name = path.strip_prefix(concat!(env!("CARGO_MANIFEST_DIR"), "/assets/"));
                    let name = name.unwrap().to_str().unwrap().to_owned();
                    assert!(ASSETS.iter().any(|asset| asset.path == name), "{name} is not served");
                }
            }
        }
    }
}
