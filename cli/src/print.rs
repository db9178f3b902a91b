//! The one place that writes to standard output and standard error.

use std::io::Write as _;

/// How results are printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Output {
    /// For people.
    #[default]
    Text,
    /// For programs: one JSON value, or one a line.
    Json,
}

/// Prints a line to standard output. A reader that went away is no error of ours.
pub(crate) fn out(line: impl std::fmt::Display) {
    let _ = writeln!(std::io::stdout().lock(), "{line}");
}

/// Prints a line to standard error.
pub(crate) fn err(line: impl std::fmt::Display) {
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}

/// Prints bytes as they are to standard output.
pub(crate) fn raw(bytes: &[u8]) {
    let _ = std::io::stdout().lock().write_all(bytes);
}

/// Lays `rows` out under `header`, columns aligned and two spaces apart.
pub(crate) fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let mut widths: Vec<usize> = header.iter().map(|it| it.chars().count()).collect();
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
    fn columns_of_a_table_are_aligned_and_lines_have_no_blanks_at_the_end() {
        let rows =
            [vec!["0".to_owned(), "Completed".to_owned()], vec!["10".to_owned(), String::new()]];
        assert_eq!(table(&["TRIAL", "PHASE"], &rows), "TRIAL  PHASE\n0      Completed\n10");
    }
}
