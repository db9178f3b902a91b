//! The only module that writes to standard output and standard error.

use std::io::Write as _;

use clap::ValueEnum;
use clap::builder::{PossibleValuesParser, TypedValueParser};

/// Output format of all commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Output {
    /// Human-readable text.
    Text,
    /// JSON: one value, or one value per line.
    Json,
}

/// Value of `--output`. The commands for metrics accept all values, other commands
/// [`text_or_json`](Self::text_or_json).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// Human-readable text
    #[default]
    Text,
    /// JSON: one value, or one value per line
    Json,
    /// CSV: a header, and one line per value
    Csv,
}

impl Format {
    /// Returns the parser for commands without CSV. clap requires one type for all arguments with
    /// the name of a global one.
    pub(crate) fn text_or_json() -> impl TypedValueParser<Value = Self> {
        let formats = [Self::Text, Self::Json];
        PossibleValuesParser::new(formats.iter().filter_map(Self::to_possible_value))
            .try_map(|text| <Self as ValueEnum>::from_str(&text, false))
    }
}

impl From<Format> for Output {
    fn from(format: Format) -> Self {
        match format {
            // Commands that accept CSV read their own argument.
            Format::Text | Format::Csv => Self::Text,
            Format::Json => Self::Json,
        }
    }
}

/// Prints a line to standard output. Write errors are ignored: the reader may have closed the pipe.
pub(crate) fn out(line: impl std::fmt::Display) {
    let _ = writeln!(std::io::stdout().lock(), "{line}");
}

/// Prints a line to standard error.
pub(crate) fn err(line: impl std::fmt::Display) {
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}

/// Writes bytes unchanged to standard output.
pub(crate) fn raw(bytes: &[u8]) {
    let _ = std::io::stdout().lock().write_all(bytes);
}

/// Formats `rows` under `header` with left-aligned columns, two spaces apart.
pub(crate) fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let mut widths: Vec<usize> = header.iter().map(|name| name.chars().count()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let line = |cells: Vec<&str>| {
        let padded = cells.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        padded.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    let mut lines = vec![line(header.to_vec())];
    lines.extend(rows.iter().map(|row| line(row.iter().map(String::as_str).collect())));
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_columns_are_aligned_without_trailing_spaces() {
        let rows =
            [vec!["0".to_owned(), "Completed".to_owned()], vec!["10".to_owned(), String::new()]];
        assert_eq!(table(&["TRIAL", "PHASE"], &rows), "TRIAL  PHASE\n0      Completed\n10");
    }
}
