//! Human-readable output of training: a progress bar and a table on a terminal, plain lines
//! otherwise.

use std::io::{IsTerminal, Write};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::callback::Logs;

/// Output of a training: lines on standard output, and a progress bar on standard error.
#[derive(Debug)]
pub(crate) struct Terminal {
    bar: Option<ProgressBar>,
    /// Column names of the last table header.
    header: Vec<String>,
    is_silent: bool,
}

impl Terminal {
    /// Creates the output. A `standalone` program on a terminal has a progress bar.
    pub(crate) fn new(standalone: bool) -> Self {
        let is_terminal = std::io::stdout().is_terminal() && std::io::stderr().is_terminal();
        let bar = (standalone && is_terminal).then(|| {
            let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
            let style = "{elapsed_precise} {wide_bar} {pos}/{len} batches, {eta} left";
            ProgressStyle::with_template(style).map(|style| bar.set_style(style)).ok();
            bar
        });
        Self { bar, header: vec![], is_silent: false }
    }

    /// Creates an output that prints nothing.
    pub(crate) fn silent() -> Self {
        Self { bar: None, header: vec![], is_silent: true }
    }

    /// Prints one line.
    pub(crate) fn print_line(&self, line: &str) {
        if self.is_silent {
            return;
        }
        let print = || {
            // Ignore the error: a closed pipe must not end training.
            let _ = writeln!(std::io::stdout(), "{line}");
        };
        match &self.bar {
            Some(bar) => bar.suspend(print),
            None => print(),
        }
    }

    /// Updates the progress bar.
    pub(crate) fn advance(&self, batches: u64, total: u64) {
        if let Some(bar) = &self.bar {
            bar.set_length(total);
            bar.set_position(batches);
        }
    }

    /// Prints a row of metrics.
    pub(crate) fn row(&mut self, group: &str, batches: u64, epoch: u64, metrics: &Logs) {
        if self.bar.is_none() {
            return self.print_line(&line(group, batches, epoch, metrics));
        }
        let names: Vec<String> =
            metrics.keys().map(|name| without_group(name).to_string()).collect();
        if names != self.header {
            self.print_line(&header(&names));
            self.header = names;
        }
        self.print_line(&table_row(group, batches, epoch, metrics));
    }

    /// Removes the progress bar.
    pub(crate) fn end(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Returns the metric's name without its group.
fn without_group(name: &str) -> &str {
    name.strip_prefix("validation_").unwrap_or(name)
}

fn line(group: &str, batches: u64, epoch: u64, metrics: &Logs) -> String {
    let mut line = format!("{group} batches={batches} epoch={}", epoch + 1);
    for (name, value) in metrics {
        line += &format!(" {}={value:.6}", without_group(name));
    }
    line
}

fn header(names: &[String]) -> String {
    let mut line = format!("{:>10} {:>9} {:>6}", "", "batches", "epoch");
    for name in names {
        line += &format!(" {name:>12}");
    }
    line
}

fn table_row(group: &str, batches: u64, epoch: u64, metrics: &Logs) -> String {
    let mut line = format!("{group:>10} {batches:>9} {:>6}", epoch + 1);
    for (name, value) in metrics {
        line += &format!(" {value:>width$.6}", width = without_group(name).len().max(12));
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_and_tables_show_every_metric() {
        let metrics =
            Logs::from([("validation_loss".into(), 0.25), ("validation_top".into(), 1.0)]);
        assert_eq!(
            line("validation", 40, 1, &metrics),
            "validation batches=40 epoch=2 loss=0.250000 top=1.000000"
        );
        let header = header(&["loss".into(), "top".into()]);
        assert_eq!(header, "             batches  epoch         loss          top");
        let row = table_row("validation", 40, 1, &metrics);
        assert_eq!(row, "validation        40      2     0.250000     1.000000");
    }
}
