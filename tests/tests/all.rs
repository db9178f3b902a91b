//! Checks across crates, in one program so that it links once.

mod architecture;
mod first_light;
mod interrupted;
mod readers;
