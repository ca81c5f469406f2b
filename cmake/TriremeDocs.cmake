# cmake --build build/release --target docs: the API page as HTML in build/docs. Needs doxygen.
list(TRANSFORM trireme_public_headers PREPEND trireme/ OUTPUT_VARIABLE trireme_api_headers)
list(SORT trireme_api_headers)
list(JOIN trireme_api_headers " " trireme_api_headers)
configure_file(${PROJECT_SOURCE_DIR}/docs/Doxyfile.in ${PROJECT_BINARY_DIR}/Doxyfile @ONLY)
add_custom_target(docs
  COMMAND ${CMAKE_COMMAND} -E make_directory ${PROJECT_SOURCE_DIR}/build/docs
  COMMAND doxygen ${PROJECT_BINARY_DIR}/Doxyfile
  WORKING_DIRECTORY ${PROJECT_SOURCE_DIR} VERBATIM)
