//! Checks across crates, in one program so that it links once.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod architecture;
mod chart;
mod exact;
mod faults;
mod first_light;
mod images;
mod inference;
mod interrupted;
mod learner;
mod left_out;
mod links;
mod proxy;
mod readers;
mod repeated;
mod scenarios;
mod stores;
mod tutorial;
mod two_nodes;
mod weights;
